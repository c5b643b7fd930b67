"""Object stores: S3, Google Cloud Storage, Azure. Read by ranges.

url         `s3://bucket/key`: text that knows its bucket, and the client that a caller may have given with it
client      every request: what is asked, what may be asked again, and when a second request is worth its price
failures    what a failure of the client means, in our errors
loop        where answers are waited for, so that no request outlives its call
store       an object, or all objects below a prefix, as a `Store`: pinned to what was there when it was opened

The client is obstore, which comes with the extra `cloud`; nothing here imports it before the first request.
"""
