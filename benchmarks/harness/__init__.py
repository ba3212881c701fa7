"""What ``benchmarks/run.py`` is made of; nothing here is imported by the package.

Read ``plan`` (sizes), ``parts`` (verify, steps, peers, big) and ``bench`` (one point) first. They use ``ranks``
(one process, or those of torchrun), ``timing`` (samples beside the ceiling), ``peers`` (implementations), ``float64``
(references), ``machine`` (facts) and ``record`` (JSON). ``tables`` and ``figures`` make the pages.
"""
