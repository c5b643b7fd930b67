"""`Reader` and `Writer`: storage for torch's own `dcp.load`, `dcp.save` and `dcp.async_save`.

    dcp.save(state, storage_writer=Writer("step-1000"))
    dcp.load(state, storage_reader=Reader("step-1000"))

reader    `Reader`: what the planner asks for, from a checkpoint of any format, straight into its tensors
writer    `Writer`: torch's own format, published by one rename
"""

from holdfast.integrations.dcp.reader import Reader
from holdfast.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
