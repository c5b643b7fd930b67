"""Object stores: S3, Google Cloud Storage, Azure. Read by ranges.

url         `Url`: the text `s3://bucket/key`, perhaps with the client that a caller passed
client      `Bucket`: every request, its retries, and second requests for late answers
failures    translates errors of the client to errors of Holdfast
loop        the event loop that waits for answers, so that no request outlives its call
store       `RemoteStore`: an object, or all objects under a prefix, of one version

The client is obstore, which comes with the extra `cloud`; nothing here imports it before the first
request.
"""
