"""What is run from a shell: ``python -m zcactor``, with the packages of the ``cli`` extra.

::

    main      the commands and their options
    doctor    what this host has and which transports work, as data
    render    that data as text

Nothing else of the package imports any of this.
"""

__all__: list[str] = []
