"""Reads models' folders without torch: where they are, models' sizes and vocabularies, and divisions among ranks."""

from relaxd.config.section import with_setting


class DataError(ValueError):
    """The data, a tokenizer or a model folder is invalid.

    `field` is the dotted name of the setting to change, such as "data.path"; the message says what is wrong and where.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(with_setting(field, message))
        self.field = field
        self.message = message
