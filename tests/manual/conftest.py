from tests.validation import _validation, validation

__all__ = ["_validation", "validation"]
