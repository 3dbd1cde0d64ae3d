"""Named pipelines as data: a pipeline is a list of elements, each the name of a Python pass or a
piece of MLIR's pipeline text, anchored on builtin.module."""

PIPELINES: dict[str, tuple[str, ...]] = {
    # What compile_module and torch.compile run between the importer and IREE.
    "inference": (
        "half-opmath",
        "torchdynamo-export-to-torch-backend-pipeline{backend-legal-ops="
        "aten.flatten.using_ints,aten.unflatten.int}",
    ),
    # What follows any pipeline: weights become parameters.
    "bind": ("bind-parameters",),
}
