"""The model of machine code held against times that GPUs took: data sets, predictions of them, the page of errors."""
