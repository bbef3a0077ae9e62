"""How a step lives with little memory. The libraries behind it are imported first of all, unheard."""

from narrowboat.machine.extras import import_hushed

import_hushed()
