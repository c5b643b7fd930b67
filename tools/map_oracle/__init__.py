"""Where each element goes when a framework converts a checkpoint, found by running the framework's own converter once.

Every element of the source has a number. The converter is given tensors that hold these numbers, and what comes out
says which element came from where. The results are kept in `tests/extras/maps/oracles`; the maps that Holdfast ships are
tested against them, without the frameworks.

    record      numbers, hashes, and the files that are kept
    configs     the small configurations: families and their variants
    hub         names and shapes of a model as it lies on the Hugging Face hub ("hf")
    titan       "hf" to and from TorchTitan
    megatron    "hf" to and from Megatron's folder of stacked layers
    standin_te  transformer-engine's modules for a machine without a GPU
    torch_dist  Megatron's folder, written by torch alone
    meta        Meta's files to "hf"
    stacked     "hf" to and from the modules of transformers in memory ("transformers")
    gguf        "hf" to GGUF
    check       whether what was recorded agrees with itself
"""
