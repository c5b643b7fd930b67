"""Object stores: S3, Google Cloud Storage, Azure. What is far away, by ranges.

url         `s3://bucket/key`: text that knows its bucket, and the client that a caller may have given with it
client      every request: what is asked, what may be asked again, and what the answers mean in our errors
patience    how long an answer takes as a rule, and so when a second request is worth its price
store       an object, or all objects below a prefix, as a `Store`: pinned to what was there when it was opened

The client is obstore, which comes with `pip install holdfast[cloud]`; nothing here imports it before the first request.
"""
