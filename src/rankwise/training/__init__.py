"""The parts of a training besides data and loop: state, model, optimizer, precision."""
