"""The operator's own checks of what is asked and answered; off unless configured."""
