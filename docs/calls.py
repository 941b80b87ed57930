"""Writes docs/calls.md from the comments in protos/: `.venv/bin/python docs/calls.py`, which `make protos` does, too.

Needs the [dev] extra (grpcio-tools).
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

from relaxd.v1.access_pb2 import callers

PAGE = Path(__file__).with_suffix(".md")
PROTOS = PAGE.parents[1] / "protos"
PACKAGE = ".relaxd.v1."
HEAD = """\
# Calls and messages

All gRPC calls of relaxd, with their messages, written from the comments in [protos/relaxd/v1](../protos/relaxd/v1).
[Admin calls](admin.md) shows many of them with grpcurl, [security](security.md) says how callers get tokens.

The column "callers" has the roles whose tokens allow a call; an admin's token allows every call. "read" is for people
and programs that only look, "parent" for the process that started this one, "replica" for every role that registers.
"""
MESSAGE, ENUM, SERVICE = 4, 5, 6
"""Field numbers in FileDescriptorProto: message_type, enum_type, service."""
FIELD, NESTED, NESTED_ENUM, METHOD, VALUE = 2, 3, 4, 2, 2
"""Field numbers of the parts in the descriptors of messages, services and enums."""
SCALARS = {
    value.number: name.removeprefix("TYPE_").lower()
    for name, value in FieldDescriptorProto.Type.DESCRIPTOR.values_by_name.items()
}
PathInFile = tuple[int, ...]


class ProtoFile:
    """A proto file and its comments."""

    def __init__(self, descriptor: FileDescriptorProto) -> None:
        self._file = descriptor
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in descriptor.source_code_info.location
        }

    def section(self) -> Iterator[str]:
        """Yield the lines of the file's section."""
        file = self._file
        yield f"\n## {Path(file.name).name}\n"
        for index, service in enumerate(file.service):
            yield f"\n### Service {service.name}\n\n{self._comment(SERVICE, index)}\n"
            yield "\n| call | request | response | callers | meaning |\n| --- | --- | --- | --- | --- |\n"
            for number, method in enumerate(service.method):
                yield _row(*_call(method), self._comment(SERVICE, index, METHOD, number))
        for index, message in enumerate(file.message_type):
            yield from self._message(message, message.name, (MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, enum.name, (ENUM, index))

    def _message(self, message: DescriptorProto, name: str, path: PathInFile) -> Iterator[str]:
        yield f"\n### {name}\n\n{self._comment(*path)}\n"
        if message.field:
            yield "\n| field | type | meaning |\n| --- | --- | --- |\n"
        for number, field in enumerate(message.field):
            choice = ""
            if field.HasField("oneof_index") and not field.proto3_optional:
                choice = f" One of `{message.oneof_decl[field.oneof_index].name}`."
            yield _row(f"`{field.name}`", _type(field, message), self._comment(*path, FIELD, number) + choice)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, f"{name}.{nested.name}", (*path, NESTED, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, NESTED_ENUM, index))

    def _enum(self, enum: EnumDescriptorProto, name: str, path: PathInFile) -> Iterator[str]:
        yield f"\n### {name}\n\n{self._comment(*path)}\n\n| value | number | meaning |\n| --- | --- | --- |\n"
        for index, value in enumerate(enum.value):
            yield _row(f"`{value.name}`", str(value.number), self._comment(*path, VALUE, index))

    def _comment(self, *path: int) -> str:
        return self._comments.get(path, "")


def page() -> str:
    """Return the page."""
    described = [
        ProtoFile(file)
        for file in sorted(_descriptors(), key=lambda file: file.name)
        if file.service or file.message_type or file.enum_type
    ]
    return HEAD + "".join(line for file in described for line in file.section())


def _descriptors() -> Sequence[FileDescriptorProto]:
    """Return the files of relaxd.v1 with their comments, by name."""
    paths = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        google = files("grpc_tools") / "_proto"
        code = protoc.main(["protoc", f"-I{PROTOS}", f"-I{google}", "--include_source_info", f"-o{out.name}", *paths])
        if code:
            raise SystemExit(code)
        return FileDescriptorSet.FromString(Path(out.name).read_bytes()).file


def _call(method: MethodDescriptorProto) -> tuple[str, str, str, str]:
    request = ("stream of " if method.client_streaming else "") + _link(method.input_type)
    response = ("stream of " if method.server_streaming else "") + _link(method.output_type)
    return f"`{method.name}`", request, response, ", ".join(method.options.Extensions[callers])


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Return the type of a field, with links to messages and enums of relaxd."""
    entries = [
        nested
        for nested in message.nested_type
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}")
    ]
    if entries:
        key, value = entries[0].field
        return f"map from {_type(key, message)} to {_type(value, message)}"
    kind = _link(field.type_name) if field.type_name else SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(type_name: str) -> str:
    name = type_name.removeprefix(PACKAGE)
    if name == type_name:
        return f"`{type_name.removeprefix('.')}`"
    return f"[{name}](#{name.lower().replace('.', '')})"


def _row(*cells: str) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |\n"


def _escaped(text: str) -> str:
    """Return text for a cell of a table: with its bars and angle brackets, which would be a table's and HTML's."""
    return re.sub(r"[|<>]", lambda found: f"\\{found[0]}", text)


if __name__ == "__main__":
    PAGE.write_text(page())
