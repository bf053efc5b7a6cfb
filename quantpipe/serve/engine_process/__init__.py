"""The engine in a process of its own, and the end of it that the HTTP process holds: ``EngineClient``.

The two are joined by a pair of sockets that carries typed messages (``messages``, ``wire``), and by nothing else. The
engine's side is ``host`` and ``__main__``; the front's are ``client``, ``supervisor``, ``connection`` and ``launch``.
"""
