"""The backend of tree models, `fil`, and the one of scikit-learn's estimators, `sklearn`."""
