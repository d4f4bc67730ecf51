import tseslint from 'typescript-eslint';

export default tseslint.config(...tseslint.configs.strict, ...tseslint.configs.stylistic, {
  rules: {
    eqeqeq: 'error',
    'no-console': 'error',
    '@typescript-eslint/no-extraneous-class': 'off',
    '@typescript-eslint/no-empty-function': 'off'
  }
});
