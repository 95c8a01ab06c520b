"""The C form of gateway/protocol/request/json_object.py, which describes this function."""

import msgspec

def find_members(
    text: bytes, raw: type[msgspec.Raw], /
) -> tuple[dict[str, msgspec.Raw], bool] | None: ...
