"""Published contrastive losses: ``adapters`` calls each as its documentation says, ``facts`` are reproducers."""
