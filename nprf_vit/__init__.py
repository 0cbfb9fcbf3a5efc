from . import models
from .models.conversion import convert
from .version import __version__

__all__ = ['__version__', 'convert', 'models']
