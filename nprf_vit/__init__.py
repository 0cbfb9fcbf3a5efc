from . import models
from .version import __version__

__all__ = ['__version__', 'models']
