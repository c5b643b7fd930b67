"""safetensors: one file, or a directory of them with or without an index."""

from __future__ import annotations

from holdfast.formats.safetensors.directory import SafetensorsDirectory
from holdfast.formats.safetensors.file import SafetensorsFile

__all__ = ["SafetensorsDirectory", "SafetensorsFile"]
