"""A soak: all verbs by many tasks for a bounded time, while everything around them breaks.

``python -m benchmarks.soak --seconds 600``
"""
