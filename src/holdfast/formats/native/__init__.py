"""The native directory: plain safetensors files, and a manifest that says everything about them. docs/formats/native.md"""
