"""A helper with an assert, by which a test sees that the asserts of helpers hold."""


def ensure(value: object) -> None:
    assert value, "the helper complains"
