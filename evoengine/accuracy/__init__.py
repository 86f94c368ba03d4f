"""Compare the model of machine code with times measured on GPUs: data sets, their predictions, the page of errors."""
