"""How long a step takes and what memory it needs: amounts, machines, tasks, schedulers, a simulator."""
