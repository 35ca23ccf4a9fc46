"""Tests of cupyattn; a package, so that tests share modules by name."""
