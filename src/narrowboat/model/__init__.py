"""The model and its adapters. The libraries behind them are imported first of all, unheard."""

from narrowboat.machine.extras import import_hushed

import_hushed()
