"""The conformance kit: whether a backend keeps the contract, op by op, rule by rule, and through the engine.

`octavo backend check NAME` runs it, `pytest --octavo-device=NAME` gives every check as a test item, and
`run.check` gives the scorecard as data. A check that draws numbers draws them from its own id, so each one
can be run alone and repeats.

| file | holds |
|---|---|
| `case.py` | what a case is, and how one fails |
| `scorecard.py` | the record of a run; imports no torch |
| `subject.py` | the backend under test |
| `truth.py`, `tolerance.py` | the operations in float64, and how far from them a result may be |
| `batches.py` | real batches for a backend's own lanes |
| `*_cases.py` | the cases |
| `tiny.py` | tiny random models |
| `run.py`, `speed.py`, `report.py` | running, timing, and showing it |
"""
