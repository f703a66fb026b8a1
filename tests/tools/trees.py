"""One small tree, in which everything is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FILES = {
    "README.md": """
        # Small

        See [the page](docs/page.md#numbers).

        ```python
        print(1 + 1)
        ```
        """,
    "CONTRIBUTING.md": """
        # Contributing

        ## Glossary

        | word | meaning | not |
        |---|---|---|
        | head | the node that decides | master |
        | lease | the right to read bytes | |

        ## Next

        | of | no | interest |
        |---|---|---|
        | 1 | 2 | 3 |
        """,
    "docs/conf.py": """
        extensions = ["myst_parser", "sphinx.ext.autodoc"]
        exclude_patterns = ["_build"]
        myst_heading_anchors = 3
        """,
    "docs/index.md": """
        # First page

        [The page](page.md) about leases and the head.

        ```{toctree}
        page
        ```

        ```{eval-rst}
        .. py:function:: small.work(x)

           See :py:func:`small.work`.
        ```
        """,
    "docs/page.md": """
        # Page

        ## Numbers

        ```python
        import asyncio

        number = 1
        ```

        The work is in `small/work.py` and `nested/deep.py: deep`. The blocks share a namespace.
        Each goes below the one before, in the same file.

        ```python
        asyncio.run(asyncio.sleep(0))
        assert number == 1
        ```

        ```python no-run it needs a second machine
        raise SystemExit("this does not run")
        ```

        Back to [numbers](#numbers) and [the first page](index.md).
        """,
    "small/work.py": '''
        """The work of the small package.

        Example::

            whoever = "in an example"
        """

        LIMIT = 3
        """The most, `whatever` it is."""


        def work(x: int) -> int:
            """Return the next number."""
            # The sum is checked, as it may overflow elsewhere.
            return x + 1  # by one
        ''',
    "small/__init__.py": "",
    "small/nested/deep.py": "deep = 1\n",
    "small/work.c": """
        /* The same in C: adds one.
         * It never fails. */
        int work(int x) { return x + 1; } // by one
        """,
}
"""Each file with its text. Each program of ``tools/`` finds nothing wrong."""

Change = Callable[[str, str, str], Path]
"""The type of the fixture `change`."""
