"""A .proto file made into message classes at import, so that nobody needs a compiler or its version.

Reads what our own files are written in: messages with plain, repeated and map fields, enums, and
services. Everything else in a file is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

_TOKEN = re.compile(r"//[^\n]*|\s+|(?P<word>[\w.]+|\"[^\"]*\"|-?\d+|[{}()<>=;,])")
_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int32", "int64", "uint32", "uint64", "bool", "string", "bytes")
}


@dataclass(frozen=True)
class Method:
    """A call of a service, by its message classes."""

    name: str
    request: Any
    answer: Any
    streams: bool
    """Whether it answers many times."""


@dataclass(frozen=True)
class ProtoFile:
    package: str
    messages: dict[str, Any]
    """The message classes by their names."""
    services: dict[str, list[Method]]


def read(path: Path) -> ProtoFile:
    file = _Reader(path).file()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    classes = {
        name: message_factory.GetMessageClass(described)
        for name, described in found.message_types_by_name.items()
    }
    services = {
        name: [
            Method(
                method.name,
                classes[method.input_type.name],
                classes[method.output_type.name],
                method.server_streaming,
            )
            for method in service.methods
        ]
        for name, service in found.services_by_name.items()
    }
    return ProtoFile(file.package, classes, services)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._words = list(_words(path))
        self._at = 0

    def file(self) -> descriptor_pb2.FileDescriptorProto:
        file = descriptor_pb2.FileDescriptorProto(name=self._path.name, syntax="proto3")
        while self._at < len(self._words):
            match self._next():
                case "syntax":
                    self._expect("=", '"proto3"', ";")
                case "package":
                    file.package = self._next()
                    self._expect(";")
                case "message":
                    self._message(file.message_type.add(), f".{file.package}")
                case "enum":
                    self._enum(file.enum_type.add())
                case "service":
                    self._service(file.service.add(), f".{file.package}")
                case word:
                    raise self._wrong(word)
        _settle(file)
        return file

    def _message(self, message: DescriptorProto, scope: str) -> None:
        message.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            match word:
                case "enum":
                    self._enum(message.enum_type.add())
                case "reserved":
                    number = int(self._next())
                    message.reserved_range.add(start=number, end=number + 1)
                    self._expect(";")
                case "map":
                    self._map(message, f"{scope}.{message.name}")
                case "repeated":
                    self._field(message, self._next(), FieldDescriptorProto.LABEL_REPEATED)
                case kind:
                    self._field(message, kind, FieldDescriptorProto.LABEL_OPTIONAL)

    def _field(
        self, message: DescriptorProto, kind: str, label: FieldDescriptorProto.Label.ValueType
    ) -> FieldDescriptorProto:
        field = message.field.add(name=self._next(), label=label)
        self._expect("=")
        field.number = int(self._next())
        self._expect(";")
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type_name = kind
        return field

    def _map(self, message: DescriptorProto, scope: str) -> None:
        """A map is a repeated message of keys and values, made up for it."""
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        name = "".join(part.capitalize() for part in self._words[self._at].split("_")) + "Entry"
        self._field(message, f"{scope}.{name}", FieldDescriptorProto.LABEL_REPEATED)
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        for number, (part, kind) in enumerate((("key", key), ("value", value)), 1):
            entry.field.add(
                name=part,
                number=number,
                type=_SCALARS[kind],
                label=FieldDescriptorProto.LABEL_OPTIONAL,
            )

    def _enum(self, enum: descriptor_pb2.EnumDescriptorProto) -> None:
        enum.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            self._expect("=")
            enum.value.add(name=word, number=int(self._next()))
            self._expect(";")

    def _service(self, service: descriptor_pb2.ServiceDescriptorProto, scope: str) -> None:
        service.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            if word != "rpc":
                raise self._wrong(word)
            method = service.method.add(name=self._next())
            self._expect("(")
            method.input_type = f"{scope}.{self._next()}"
            self._expect(")", "returns", "(")
            if (answer := self._next()) == "stream":
                method.server_streaming, answer = True, self._next()
            method.output_type = f"{scope}.{answer}"
            self._expect(")", ";")

    def _next(self) -> str:
        if self._at == len(self._words):
            raise ValueError(f"{self._path.name} ends in the middle of something")
        self._at += 1
        return self._words[self._at - 1]

    def _expect(self, *words: str) -> None:
        for word in words:
            if (found := self._next()) != word:
                raise self._wrong(found)

    def _wrong(self, word: str) -> ValueError:
        return ValueError(f"{self._path.name}: '{word}' is not expected at word {self._at}")


def _words(path: Path) -> Iterator[str]:
    text, at = path.read_text(encoding="utf-8"), 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{path.name} cannot be read at character {at}")
        at = found.end()
        if found["word"] is not None:
            yield found["word"]


def _settle(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Types of a file's own may be used before they are defined: told apart once all are known."""
    enums = {e.name for e in file.enum_type}
    for message in file.message_type:
        inner = {e.name for e in message.enum_type}
        for field in message.field:
            name = field.type_name
            if not name:
                continue
            is_enum = name in enums or name in inner
            field.type = (
                FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
            )
            if not name.startswith("."):
                where = f"{file.package}.{message.name}" if name in inner else file.package
                field.type_name = f".{where}.{name}"
