"""The shell commands: ``python -m zcactor``, with the packages of the ``cli`` extra.

::

    main      the commands and their options
    nodes     the commands that start and stop nodes
    status    the command that shows nodes, programs and actors
    doctor    this host's means and which transports work, as data
    render    that data as text
    demo      zcactor beside multiprocessing and joblib on this machine, without the extra

No other part of the package imports this one.
"""

__all__: list[str] = []
