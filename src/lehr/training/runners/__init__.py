"""How the updates of a run are made: on the device, around environments on the host, or fed by actors."""
