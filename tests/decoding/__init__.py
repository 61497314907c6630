import pytest

# Their assertions then tell of values, as those of tests do.
pytest.register_assert_rewrite("tests.decoding.compiled", "tests.decoding.translators")
