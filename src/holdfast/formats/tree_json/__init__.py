"""Python state as JSON that says its types: plain JSON where JSON has the type, an object with a `$` where it has not.

encode, decode    there and back          scalars    values without parts that JSON cannot say
"""
