"""Table 3: its rows as data, sweeps over them, their results and reports."""
