"""What a training consists of besides its data and its loop: state, model, optimizer, precision."""
