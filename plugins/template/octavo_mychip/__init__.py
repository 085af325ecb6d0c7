"""What Octavo asks this package. Every `octavo` command imports it: nothing heavy belongs here."""

from octavo.plugins import Backend, hookimpl
from octavo_mychip.backend import MychipBackend


@hookimpl
def octavo_backends() -> list[Backend]:
    return [MychipBackend()]
