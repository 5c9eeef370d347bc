"""Version of the compiler; part of the cache key, so it changes whenever the output could."""

COMPILER_VERSION = "0.1.0"
