"""ONNX models, of which the initializers are read.

wire    fields of a protobuf message, without protobuf
read    the initializers of a model: where each lies, in the model or in a file beside it
"""
