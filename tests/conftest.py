"""What all tests share."""

from octavo.core.config import prepare_thread_environment

prepare_thread_environment()  # before any test imports torch, as the engine's own doors do
