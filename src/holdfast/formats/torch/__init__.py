"""torch's own containers: the zip since 1.6, the stream and the tar before it, and TorchScript archives as data.

zip, legacy      the containers, read, alone or in records    table      the globals of their pickles
tensors          what a tensor claims, checked               storages   persistent ids, and the storages behind them
write, writer    the zip, laid out; the pickle in it         rows       the same pickle, of very many tensors
records          which storages a file gets                   directory  a Hugging Face folder of `pytorch_model*.bin`
"""
