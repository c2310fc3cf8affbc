f1_score = matthews_corrcoef = None
