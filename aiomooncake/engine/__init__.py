"""The engine layer: the only code that touches the ``mooncake`` package."""
