"""torch's own containers: the zip since 1.6, the stream and the tar before it, and TorchScript archives as data.

zip, legacy      the containers, read, alone or in records    table      the globals of their pickles
tensors          what a tensor claims, checked               storages   persistent ids, and the storages behind them
write, writer    the zip, laid out; the pickle in it         pickled    its tensors, by kinds, and the records that they get
composites       sparse, quantised, nested tensors in it      directory  a Hugging Face folder of `pytorch_model*.bin`
"""
