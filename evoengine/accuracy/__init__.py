"""The model of machine code held against times that GPUs took: data sets, predictions of them, and the page of errors."""
