"""torch's own containers: the zip since 1.6, the stream and the tar before it, and TorchScript archives as data.

zip, legacy      the containers, read, alone or in records    reducers   the calls of their pickles, checked, for both builders
tensors          the claims of a tensor, checked             storages   persistent ids, and the storages behind them
composites       sparse, quantised, nested, jagged tensors    table      the builder of lazy tensors
write, writer    the zip, laid out; the pickle in it         pickled    its tensors, by kinds, and the records that they get
                                                             directory  a Hugging Face folder of `pytorch_model*.bin`
"""
