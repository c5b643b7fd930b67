"""torch's own containers: the zip since 1.6, the stream and the tar before it, and TorchScript archives as data."""
