"""The two parts of a dataset, as this package calls them; what they are called in the data is in the configuration."""

from typing import Literal

Split = Literal['train', 'validation']
