"""Holdfast where other programs have a hook for it. Each module imports its framework when it is imported; nothing is patched.

dcp          torch's distributed checkpoint: `Reader` and `Writer` for `dcp.load`, `dcp.save` and `dcp.async_save`
accelerate   `save_state`, which seals; `load_state`, which takes the newest that is whole; `guard` for accelerate's own
jax          `load` onto the devices of a mesh; its short name is `holdfast.jax`
lightning    `HoldfastIO` for the `plugins` of Lightning's Trainer and Fabric
sglang       `HoldfastLoader`, a class for its `load_format`
torchtitan   `Checkpointer` for the `checkpoint` of its configuration
transformers `SealCallback` for its Trainer, `latest_whole` for resuming (`keeping`: which stay)
vllm         `HoldfastLoader`, and `register`: the entry point by which vLLM knows `--load-format holdfast`

weights has what the loaders of vLLM and SGLang share.
"""
