"""GGUF, the file of llama.cpp and its family; read-only.

read         one file, or the files that one was split into        schema    the header: values and tensors, from bytes
"""
