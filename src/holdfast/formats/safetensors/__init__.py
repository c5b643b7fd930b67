"""safetensors: one file, or a directory of them with or without an index; read and laid out."""
